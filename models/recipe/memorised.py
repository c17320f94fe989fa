"""Which answers of the demonstration model recite its training text.

    python models/recipe/memorised.py --limit 24 --max-new-tokens 96

An answer is *memorised* if a run of at least half of its characters, and of at least 80, stands letter for
letter in a file that the model was trained on (``lab.training.python_source``: the standard library's and
transformers' source as installed here, without the groups that were held out).  Such text is drafted almost
without a miss, and flatters every method that drafts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from flowspec_edge.cli.common.workload import demo_prompts
from flowspec_edge.lab.bench.tasks import load_prompts
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.lab.training.python_source import documents, is_held_out
from flowspec_edge.model.opened import DEMO, resolve_model
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.settings import Sampling

SHORTEST = 80
_BLOCK = SHORTEST // 2
_END = "\0"  # between files


def is_memorised(answer: str, text: str) -> bool:
    least = max(SHORTEST, -(-len(answer) // 2))
    # A run that is long enough holds one of these blocks whole; most of them are nowhere in the long text.
    blocks = [at for at in range(0, len(answer) - _BLOCK + 1, _BLOCK) if answer[at:at + _BLOCK] in text]
    starts = (begin for begin in range(len(answer) - least + 1)
              if any(begin <= at <= begin + least - _BLOCK for at in blocks))
    return any(answer[begin:begin + least] in text for begin in starts)


def answers(limit: int, most: int) -> list[str]:
    model = resolve_model(DEMO)
    tokenizer, decoder = Tokenizer(model), PlainDecoder(model.path)
    texts: list[str] = []
    for prompt in load_prompts(demo_prompts(), limit):
        tokens, _ = decoder.generate(tokenizer.encode(prompt.text), most, Sampling(), model.stop_ids)
        texts.append(tokenizer.decode(tokens))
    return texts


def report(texts: Sequence[str], text: str) -> None:
    counted = [number for number, answer in enumerate(texts) if is_memorised(answer, text)]
    for number in counted:
        print(f"prompt {number}: {texts[number]!r}")
    print(f"memorised, by the prompts' numbers from 0: {', '.join(map(str, counted)) or 'none'} "
          f"({len(counted)} of {len(texts)} answers)")


def main() -> None:
    options = argparse.ArgumentParser(description="Which answers recite the training text.")
    options.add_argument("--limit", type=int, default=24)
    options.add_argument("--max-new-tokens", type=int, default=96)
    args = options.parse_args()
    text = _END.join(document.text for document in documents() if not is_held_out(document.group))
    report(answers(args.limit, args.max_new_tokens), text)


if __name__ == "__main__":
    main()

"""Recordings: the file, and virtual time over one against virtual time with the weights."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.byte_mutations import mutations
from kits.tiny_model_dir import tiny_eagle3, tiny_model_dir

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.recorded import digest, request_of
from flowspec_edge.drivers.virtual.recording import Expansion, RecordedText, Recording, load_recording, rounded
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.record import Budget, Expander, TextToRecord, record
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES
from flowspec_edge.tree.draft_api import DraftOutput

TOKENS = 20
PARAMS = Params(draft="eagle2")
DRAFTING = sorted(name for name in STRATEGIES if name != "spd")  # SPD's module drafts for SPD alone


@pytest.fixture(scope="module")
def asked(demo_model: Path, demo_prompts: list[list[int]]) -> list[TextToRecord]:
    stops = OpenModel(demo_model).stop_ids
    return [TextToRecord("code", "first", Request(demo_prompts[0], max_new_tokens=TOKENS, sampling=sampling,
                                                  stop_ids=stops, params=PARAMS))
            for sampling in (Sampling(), Sampling(1.0, seed=3))]


@pytest.fixture(scope="module")
def about(demo_model: Path) -> Recording:
    model = OpenModel(demo_model)
    vocabulary = int(model.parsed_config.vocab_size)
    return Recording("demo", model.layers, vocabulary, model.stop_ids, "eagle2", PARAMS.rank, PARAMS.tau, ())


@pytest.fixture(scope="module")
def recorded(demo_model: Path, asked: list[TextToRecord], about: Recording,
             tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Through a file."""
    place = tmp_path_factory.mktemp("recording")
    cluster = VirtualCluster(demo_model, 1, load_profile("paper-7b"))
    record(cluster, asked, about, Budget(160, 16), place / "work").save(place / "demo.flowrec")
    return load_recording(place / "demo.flowrec")


@pytest.fixture(scope="module")
def computed(demo_model: Path) -> VirtualCluster:
    return VirtualCluster(demo_model, 4, load_profile("paper-7b"))


def test_a_prompt_without_an_answer_at_one_temperature_is_left_out(demo_model: Path, demo_prompts: list[list[int]],
                                                                  about: Recording, tmp_path: Path) -> None:
    """Or a benchmark of both temperatures would miss a text in the middle of it."""
    cluster = VirtualCluster(demo_model, 1, load_profile("paper-7b"))
    [first] = cluster.generate(Request(demo_prompts[1], max_new_tokens=1)).tokens
    sampled = Sampling(1.0, seed=3)
    [other] = cluster.generate(Request(demo_prompts[1], max_new_tokens=1, sampling=sampled)).tokens
    assert other != first
    asked = [TextToRecord("code", name, Request(prompt, max_new_tokens=2, sampling=sampling, stop_ids=frozenset(stops),
                                                params=PARAMS))
             for name, prompt, stops in (("whole", demo_prompts[0], ()), ("empty", demo_prompts[1], (first,)))
             for sampling in (Sampling(), sampled)]
    texts = record(cluster, asked, about, Budget(4, 4), tmp_path / "work").texts
    assert [(text.name, text.sampling.temperature) for text in texts] == [("whole", 0.0), ("whole", 1.0)]


# ---- virtual time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", DRAFTING)
def test_every_strategy_gives_the_recorded_text(recorded: Recording, strategy: str) -> None:
    cluster = VirtualCluster(recorded, 4, load_profile("paper-7b"))
    for text in recorded.texts:
        request = request_of(text, recorded, TOKENS, strategy=strategy, params=PARAMS)
        assert cluster.generate(request).tokens == list(text.answer)


@pytest.mark.parametrize("strategy", ["autoregressive", "chunk_pp", "flowspec", "flowspec_plus", "pipedec", "chain"])
def test_the_figures_are_those_of_the_weights(recorded: Recording, computed: VirtualCluster, strategy: str) -> None:
    """To the digit where every pass is asked for below the newest root; else nodes keep what an older root said."""
    cluster = VirtualCluster(recorded, 4, load_profile("paper-7b"))
    pairs = []
    for text in recorded.texts:
        request = request_of(text, recorded, TOKENS, strategy=strategy, params=PARAMS)
        own, theirs = cluster.generate(request).stats, computed.generate(request).stats
        assert own.tokens_per_second
        assert theirs.tokens_per_second
        pairs.append((own.tokens_per_second, theirs.tokens_per_second))
    within = 1e-6 if strategy in ("autoregressive", "chunk_pp") else 0.15  # of one text of 20 tokens
    for one, other in pairs:
        assert one == pytest.approx(other, rel=within)


def test_an_answer_that_ended_ends_there_again(demo_model: Path, recorded: Recording, about: Recording, tmp_path: Path
                                               ) -> None:
    text = recorded.texts[0]
    whole = text.answer[: text.answer.index(text.answer[5])]
    about = replace(about, stop_ids=frozenset({text.answer[5]}))
    asked = [TextToRecord("code", "short", Request(list(text.prompt), max_new_tokens=TOKENS, stop_ids=about.stop_ids,
                                                   params=PARAMS))]
    short = record(VirtualCluster(demo_model, 1, load_profile("paper-7b")), asked, about, Budget(16, 8), tmp_path)
    [one] = short.texts
    assert (one.answer, one.reason, one.stop) == (whole, "stop", text.answer[5])
    again = VirtualCluster(short, 4, load_profile("paper-7b")).generate(request_of(one, short, TOKENS, params=PARAMS))
    assert (tuple(again.tokens), again.finish_reason) == (whole, "stop")


def test_drafts_of_several_requests_are_one_pass(recorded: Recording, computed: VirtualCluster) -> None:
    """As the head's are: with passes of their own, four requests would be slower than with the weights."""
    cluster = VirtualCluster(recorded, 4, load_profile("paper-7b"))
    asked = [request_of(recorded.texts[i % 2], recorded, TOKENS, strategy="chunk_pp", params=PARAMS) for i in range(4)]
    own, theirs = (place.generate_many(asked) for place in (cluster, computed))
    assert [result.tokens for result in own] == [list(recorded.texts[i % 2].answer) for i in range(4)]
    assert [result.stats.tokens_per_second for result in own] == pytest.approx(
        [result.stats.tokens_per_second for result in theirs], rel=1e-6)


def test_what_a_recording_lacks_is_counted(recorded: Recording) -> None:
    """A recording of the roots alone has no child's children."""
    bare = replace(recorded, texts=tuple(
        replace(text, roots=tuple(Expansion(*(getattr(root, name)[:1] for name in
                                              ("parents", "node_tokens", "tokens", "scores"))) for root in text.roots))
        for text in recorded.texts))
    cluster = VirtualCluster(bare, 4, load_profile("paper-7b"))
    assert cluster.note() == ""
    text = bare.texts[0]
    assert cluster.generate(request_of(text, bare, TOKENS, strategy="flowspec", params=PARAMS)
                            ).tokens == list(text.answer)
    asked = cluster._model.sessions.requested
    assert 0 < asked.missing < asked.right < asked.nodes
    assert f"of {asked.missing / asked.right:.1%} of the" in cluster.note()
    assert "--nodes" in cluster.note()


@pytest.mark.parametrize(("text", "change", "said"), [
    (0, {"prompt": (1, 2, 3)}, "has no text of this prompt"),
    (0, {"sampling": Sampling(0.5)}, "has no text of this prompt"),
    (0, {"max_new_tokens": TOKENS + 1}, f"has {TOKENS} tokens after the prompt first, not {TOKENS + 1}"),
    (0, {"strategy": "pearl", "params": Params()}, "drafts with"),
    (0, {"logprobs": 1}, "probabilities"),
    (1, {"strategy": "flowspec", "params": Params(draft="eagle2", rank="draft")}, "rank=noise"),
])
def test_a_request_that_was_not_recorded(recorded: Recording, text: int, change: dict[str, object], said: str) -> None:
    cluster = VirtualCluster(recorded, 2, load_profile("paper-7b"))
    request = request_of(recorded.texts[text], recorded, TOKENS, params=PARAMS)
    with pytest.raises(UsageError, match=said):
        cluster.generate(replace(request, **change))


def test_no_tensor_library_is_imported(recorded: Recording) -> None:
    code = f"""
import sys
from pathlib import Path
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.recorded import request_of
from flowspec_edge.drivers.virtual.recording import load_recording
recording = load_recording(Path({str(recorded.path)!r}))
text = recording.texts[0]
cluster = VirtualCluster(recording, 4, load_profile("paper-7b"))
assert cluster.generate(request_of(text, recording, 8)).tokens == list(text.answer[:8])
print(sorted(sys.modules.keys() & {{"torch", "transformers", "tokenizers", "zmq"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=6), st.lists(st.integers(0, 2**20), min_size=1, max_size=6))
def test_paths_that_differ_have_other_digests(one: list[int], other: list[int]) -> None:
    def of(tokens: list[int]) -> int:
        path = 0
        for token in tokens:
            path = digest(path, token)
        return path

    assert (of(one) == of(other)) == (one == other)
    assert 0 <= of(one) < 2**64


# ---- recording ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(1, 90), st.integers(1, 5), st.lists(st.integers(0, 20), max_size=4))
def test_the_expander_takes_levels_the_text_and_the_likeliest(seed: int, nodes: int, children: int, text: list[int]
                                                             ) -> None:
    """Each pass takes the text's next node and the likeliest: ten of a level, of five levels, then 16 of all."""
    random = np.random.default_rng(seed)
    expander = Expander(Budget(nodes, children), text)
    sums: list[float] = []
    depths: list[int] = []
    level = 0
    while places := expander.next():
        left = sorted(((sums[place] + score, place, token) for place in range(len(sums)) for token, score in
                       zip(expander.tokens[place], expander.scores[place], strict=True)
                       if (place, token) not in expander.nodes), reverse=True)
        room = nodes - len(sums)
        if sums and room > 0 and level < 5:
            level += 1
            wanted = [found for found in left if depths[found[1]] == level - 1][: min(10, room)]
        else:
            wanted = left[: max(0, min(16, room)) if sums else 0]
        assert {(parent, token) for _, parent, token in wanted} <= {*places}
        assert len(places) <= max(1, len(wanted) + 1)
        tokens = np.stack([random.permutation(21)[:children] for _ in places]).astype(np.int32)
        output = DraftOutput(tokens, -np.sort(random.exponential(1.0, tokens.shape), axis=1))
        for parent, token in places:
            named = dict(zip(expander.tokens[parent], expander.scores[parent], strict=True)) if parent >= 0 else {}
            sums.append(sums[parent] + named.get(token, min(expander.scores[parent])) if parent >= 0 else 0.0)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        expander.add(places, output)
    found = expander.expansion()
    expanded = [*zip(found.parents.tolist(), found.node_tokens.tolist(), strict=True)]
    assert len({*expanded}) == len(expanded)
    assert all(parent < place for place, parent in enumerate(found.parents.tolist()))
    assert nodes <= len(expanded) <= nodes + len(text) or children == 1
    at = 0
    for token in text:
        at = found.index[at, token]


def test_a_run_that_broke_off_continues(demo_model: Path, asked: list[TextToRecord], about: Recording,
                                        recorded: Recording, tmp_path: Path) -> None:
    cluster, short = VirtualCluster(demo_model, 1, load_profile("paper-7b")), [
        replace(text, request=replace(text.request, max_new_tokens=4)) for text in asked]
    first = record(cluster, short[:1], about, Budget(8, 4), tmp_path)

    class Failing(VirtualCluster):
        def generate(self, request: Request, *_: object) -> object:
            assert request.sampling.temperature, "the greedy text is there already"
            return cluster.generate(request)

    again = record(Failing(demo_model, 1, load_profile("paper-7b")), short, about, Budget(8, 4), tmp_path)
    assert again.texts[0].answer == first.texts[0].answer == recorded.texts[0].answer[:4]
    assert len(again.texts) == 2
    assert again.nodes >= 2 * 3 * 8  # the last token of four needs no tree


# ---- files -------------------------------------------------------------------------------------------------------


def drawn(seed: int, texts: int = 2) -> Recording:
    """A recording of random trees."""
    rng = np.random.default_rng(seed)

    def expansion() -> Expansion:
        nodes, children = int(rng.integers(1, 9)), 3
        parents = np.array([-1, *(rng.integers(0, i) for i in range(1, nodes))], np.int32)
        scores = -np.sort(rng.exponential(3.0, (nodes, children)), axis=1)
        scores[rng.random((nodes, children)) < 0.2] = -np.inf
        tokens = np.where(np.isfinite(scores), rng.integers(0, 70_000, (nodes, children)), -1).astype(np.int32)
        order = np.argsort(-scores, axis=1, kind="stable")
        own = np.where(parents >= 0, rng.integers(0, 70_000, nodes), -1).astype(np.int32)
        return Expansion(parents, own,
                         np.take_along_axis(tokens, order, 1), rounded(np.take_along_axis(scores, order, 1)))

    def text(i: int) -> RecordedText:
        answer = tuple(rng.integers(0, 70_000, rng.integers(1, 5)).tolist())
        stop = 7 if rng.random() < 0.5 else None
        return RecordedText("task", str(i), tuple(rng.integers(0, 70_000, rng.integers(1, 5)).tolist()), answer,
                            "length" if stop is None else "stop", stop, Sampling(float(i), seed=i),
                            tuple(expansion() for _ in answer))

    return Recording("model", 4, 70_000, frozenset({7}), "eagle2", "noise", 0.6, tuple(map(text, range(texts))),
                     {"licence": "none"})


@given(st.integers(0, 2**32 - 1))
def test_a_file_gives_back_what_was_saved(seed: int) -> None:
    before = drawn(seed)
    with TemporaryDirectory() as place:
        path = Path(place) / "x.flowrec"
        before.save(path)
        after = load_recording(path)
    assert replace(after, texts=(), path=None).__dict__ == replace(before, texts=()).__dict__
    for one, other in zip(before.texts, after.texts, strict=True):
        assert (one.prompt, one.answer, one.reason, one.stop, one.sampling) == (
            other.prompt, other.answer, other.reason, other.stop, other.sampling)
        for mine, theirs in zip(one.roots, other.roots, strict=True):
            for name in ("parents", "node_tokens", "tokens", "scores"):
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
    assert after.packed() == before.packed()


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path, whole = tmp_path / "x.flowrec", drawn(1).packed()
    for content in [b"", whole[:100], whole[:-30], *mutations([whole], 300)]:
        path.write_bytes(content)
        said = refusal(path)
        assert "\n" not in said
        # What is read although it differs has a change where nothing is kept, such as a date.
        assert str(path) in said if said else content == whole or zipfile.ZipFile(path).testzip() is None


def refusal(path: Path) -> str:
    try:
        load_recording(path)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "old", "new", "said"), [
    ("recording.json", b'"format": 1', b'"format": 2', "format 2; this release reads format 1"),
    ("recording.json", b'"vocabulary": 70000', b'"vocabulary": 9', "outside the vocabulary of 9"),
    ("recording.json", b'"children": 3', b'"children": 4', "other sizes"),
    ("recording.json", b'"answer": ', b'"answer": 1', "other lengths|tokens of prompt"),
    ("recording.json", b"{", b"[", "is incomplete or damaged"),
])
def test_a_file_that_is_not_consistent(tmp_path: Path, name: str, old: bytes, new: bytes, said: str) -> None:
    good, bad = tmp_path / "good.flowrec", tmp_path / "bad.flowrec"
    drawn(2).save(good)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for entry in source.namelist():
            content = source.read(entry)
            if entry == name:
                assert old in content
                content = content.replace(old, new, 1)
            target.writestr(entry, content)
    with pytest.raises(UsageError, match=said):
        load_recording(bad)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="flowspec record --out"):
        load_recording(tmp_path / "none.flowrec")


@pytest.mark.slow
def test_processes_record_what_virtual_time_does(tmp_path: Path) -> None:
    """An EAGLE-3 head, which reads inner states that the stages send."""
    model = tiny_model_dir(tmp_path / "model")
    tiny_eagle3(model)
    params = Params(draft="eagle3")
    about = Recording("tiny", 4, 300, frozenset(), "eagle3", params.rank, params.tau, ())
    asked = [TextToRecord("t", "1", Request(list(range(3, 20)), max_new_tokens=5, sampling=Sampling(1.0, seed=1),
                                            params=params))]
    one = record(VirtualCluster(model, 1, load_profile("paper-7b")), asked, about, Budget(24, 6), tmp_path / "one")
    with open_cluster(ClusterSpec(model, 2)) as cluster:
        two = record(cluster, asked, about, Budget(24, 6), tmp_path / "two")
    [mine], [theirs] = one.texts, two.texts
    assert mine.answer == theirs.answer
    for here, there in zip(mine.roots, theirs.roots, strict=True):
        np.testing.assert_array_equal(here.node_tokens, there.node_tokens)
        np.testing.assert_allclose(here.scores, there.scores, atol=2e-3)

"""A stage is killed while clients read: their streams go on, and end with the text of plain decoding."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kits.http_server import NAME, running, served
from kits.process_clusters import PATIENCE
from transformers import AutoTokenizer

from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sampling.rule import Sampling

PROMPT = "def f(x): return"


def test_streams_go_on_when_a_stage_was_killed(model: Path, plain: PlainDecoder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model / "target")
    ids, stop = tokenizer(PROMPT)["input_ids"], OpenModel(model).stop_ids
    with open_cluster(ClusterSpec(model, 2, threads=1, at_once=2, rejoin_within=PATIENCE)) as processes, \
            running(served(model), processes, at_once=2) as server, ThreadPoolExecutor(2) as pool:

        before = processes.pids

        def text(seed: int, strikes: bool) -> str:
            chunks = server.client.completions.create(
                model=NAME, prompt=PROMPT, max_tokens=60, stream=True, temperature=1.0, seed=seed)
            first = next(iter(chunks)).choices[0].text
            if strikes:
                os.kill(before[1], signal.SIGKILL)
            return first + "".join(chunk.choices[0].text for chunk in chunks)

        found = list(pool.map(text, (3, 4), (False, True)))
        expected = [tokenizer.decode(plain.generate(ids, 60, Sampling(1.0, seed=seed), stop)[0])
                    for seed in (3, 4)]
        assert found == expected
        after = processes.pids
        assert (after[0] == before[0], after[1] == before[1]) == (True, False)
        assert server.ready() == (200, "")

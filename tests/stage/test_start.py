"""What a stage's process imports: neither transformers nor what PyTorch compiles with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kits.family_checkpoints import family_model

CODE = """
import sys
from pathlib import Path
from flowspec_edge.drivers.stage import load, process, worker
from flowspec_edge.messages import Open
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_shard
engine = StageEngine(load_shard(OpenModel(Path(sys.argv[1])), 0, 2, "fp32"))
engine.open(Open(0, 0, 64))
heavy = "transformers", "tokenizers", "huggingface_hub", "sympy", "torch._dynamo"
print([name for name in heavy if name in sys.modules])
"""


@pytest.mark.parametrize("family", ["llama", "qwen3.5-moe"])
def test_a_stage_needs_no_transformers(family: str, tmp_path: Path) -> None:
    model = family_model(family, tmp_path)
    run = subprocess.run([sys.executable, "-c", CODE, str(model)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

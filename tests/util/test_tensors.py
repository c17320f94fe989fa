"""Payloads and tensors: no copy on the CPU, bits unchanged, wrong types refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.tiny_models import tiny_llama

from flowspec_edge.errors import ProtocolError, UsageError
from flowspec_edge.messages import Payload
from flowspec_edge.util.tensors import from_torch, parse_dtype, to_torch

NAMES = {"fp32": ("float32", np.float32), "fp16": ("float16", np.float16), "bf16": ("bfloat16", np.uint16)}


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_shares_memory(name: str) -> None:
    tensor = torch.randn(3, 5).to(parse_dtype(name))
    payload = from_torch(tensor)
    assert (payload.dtype, payload.array.dtype) == NAMES[name]
    assert payload.array.ctypes.data == tensor.data_ptr()
    back = to_torch(payload)
    assert back.data_ptr() == tensor.data_ptr()
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("name", NAMES)
def test_a_received_frame_is_read_in_place(name: str) -> None:
    """Frames are read-only bytes; torch must neither copy nor warn (warnings are errors here)."""
    tensor = torch.randn(2, 4).to(parse_dtype(name))
    frame = from_torch(tensor).array.tobytes()
    array = np.frombuffer(frame, dtype=NAMES[name][1]).reshape(2, 4)
    assert not array.flags.writeable
    back = to_torch(Payload(NAMES[name][0], array))
    assert back.data_ptr() == array.ctypes.data
    assert torch.equal(back, tensor)


def test_the_tensor_keeps_the_frame_alive() -> None:
    back = to_torch(Payload("float32", np.frombuffer(np.arange(6, dtype=np.float32).tobytes(), np.float32)))
    np.random.default_rng(0).bytes(1 << 20)
    assert back.tolist() == [0, 1, 2, 3, 4, 5]


def test_strided_and_empty_tensors() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    assert np.array_equal(from_torch(tensor).array, tensor.numpy())
    assert to_torch(from_torch(torch.empty(0, 7, dtype=torch.bfloat16))).shape == (0, 7)


def test_wrong_types_are_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown dtype 'int4'"):
        to_torch(Payload("int4", np.zeros(2, np.uint8)))
    with pytest.raises(ProtocolError, match="says float16 but holds float32"):
        to_torch(Payload("float16", np.zeros(2, np.float32)))
    with pytest.raises(UsageError, match="no dtype 'fp8': use one of fp32, fp16, bf16"):
        parse_dtype("fp8")


@pytest.mark.slow
def test_libraries_show_no_bars_while_a_model_loads(tmp_path: Path) -> None:
    """In a process without the commands' environment; bars of others are shown as before."""
    tiny_llama(tmp_path, layers=1)
    program = ("import sys; from pathlib import Path; from flowspec_edge.lab.plain import PlainDecoder; "
               "from transformers import AutoModel; PlainDecoder(Path(sys.argv[1])); "
               "print('LOADED', file=sys.stderr); AutoModel.from_pretrained(sys.argv[1])")
    environment = {key: value for key, value in os.environ.items() if key != "TQDM_DISABLE"}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True,
                          check=True, env=environment)
    ours, others = done.stderr.split("LOADED")
    assert ("%|" in ours, "%|" in others) == (False, True)

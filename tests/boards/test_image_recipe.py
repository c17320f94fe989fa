"""Dockerfile.jetson, the guide to images, and what is known of JetPack releases agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowspec_edge.util.jetson import ORIN, jetpacks

ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "Dockerfile.jetson").read_text()
GUIDE = (ROOT / "docs" / "guides" / "image.md").read_text()
BASES = dict(re.findall(r"^FROM (\S+) AS jetpack-(\d)$", RECIPE, re.MULTILINE))
SUPPORTED = sorted({known.name[0] for known in jetpacks() if known.supported})


def test_every_supported_jetpack_has_a_base_image() -> None:
    assert sorted(BASES.values()) == SUPPORTED
    assert re.search(r"^ARG JETPACK=(\d)$", RECIPE, re.MULTILINE)[1] in SUPPORTED  # type: ignore[index]
    assert "\nARG BASE=jetpack-${JETPACK}\n" in RECIPE


@pytest.mark.parametrize(("image", "jetpack"), BASES.items())
def test_the_base_image_is_of_that_jetpack(image: str, jetpack: str) -> None:
    """L4T images name the release of L4T that they are for."""
    assert f"`{image}`" in GUIDE
    l4t = re.search(r"-r(\d+\.\d+)", image)
    assert not l4t or any(known.name[0] == jetpack and known.supported and f"{l4t[1]}.".startswith(known.l4t)
                          for known in jetpacks())


def test_the_kernels_are_built_for_every_board() -> None:
    """Orins run both releases."""
    capabilities = re.findall(r"^ENV COMPUTE_CAPABILITY=(\S+)$", RECIPE, re.MULTILINE)
    assert len(capabilities) == len(BASES)
    assert all("".join(map(str, ORIN)) in capability.split(";") for capability in capabilities)


def test_the_program_of_the_image_is_flowspec() -> None:
    """Which services and a user by hand run; tools run python3, as root."""
    assert '\nENTRYPOINT ["flowspec"]\n' in RECIPE
    assert "\nUSER " in RECIPE

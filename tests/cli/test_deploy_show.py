"""The screen of a rollout, told of it by several boards at once."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.progress import Progress, TextColumn

from flowspec_edge.cli.deploy_show import Screen
from flowspec_edge.fleet.desired import Step


def test_boards_tell_of_themselves_while_the_phase_changes() -> None:
    said = io.StringIO()
    columns = (TextColumn("{task.description}"), TextColumn("{task.fields[says]}"))
    with Progress(*columns, console=Console(file=said, width=100)) as progress:
        screen = Screen(progress)

        def tell(board: int) -> None:
            for count in range(50):
                screen.amount(f"board-{board}", count * 10**6, 49 * 10**6)
                screen.step(Step(f"board-{board}", f"step {count}", changed=True))
                if not board:
                    screen.phase(f"phase {count}")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(tell, range(4)))
        screen.phase("the end")
        screen.amount("board-1", 10**6, 2 * 10**6)
    shown = said.getvalue().splitlines()
    assert [line.split() for line in shown] == [["the", "end"], ["board-1", "1", "of", "2", "MB"]]

"""Which part of a completion is the program."""

from __future__ import annotations

import pytest

from strop.rewards.code_block import find_program

BLOCK = "```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (BLOCK, "print(1)"),
        (f"First.\n{BLOCK}\nThen.\n```python\nx = 1\nprint(2)\n```\nDone.", "x = 1\nprint(2)"),
        ("```\nprint(3)\n```", "print(3)"),
        (f"{BLOCK}\n```\nthe output\n```", "print(1)"),
        (f"{BLOCK}\n```text\nthe output\n```", "print(1)"),
        ("```py\na\n```", "a"),
        ("```Python3 title=x\na\n```", "a"),
        ("~~~python\na\n```\nb\n~~~", "a\n```\nb"),
        ("````python\na\n````", "a"),
        ("  ```python\n  a\n  ```", "  a"),
        ("```python\nfor x in y:\n    pass", "for x in y:\n    pass"),
        ("```python\n```", ""),
        ("<think>\n```python\nwrong\n```\n</think>\n" + BLOCK, "print(1)"),
        ("```bash\nls\n```", None),
        ("no block", None),
        ("`python`", None),
        ("", None),
    ],
)
def test_the_last_block_of_python_counts(completion: str, program: str | None) -> None:
    assert find_program(completion, "block") == program
    assert find_program(completion, "auto") == (completion if program is None else program)
    assert find_program(completion, "whole") == completion


def test_a_million_fences_are_read_in_linear_time() -> None:
    assert find_program("```\n" * 1_000_000, "block") is not None
    assert find_program("```python\n" * 300_000, "block") is not None

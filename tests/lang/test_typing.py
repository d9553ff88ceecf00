"""What a type checker knows of a program: mypy reads one and says what it sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = '''
from dataclasses import dataclass
import ramet as rt

@dataclass
class City:
    name: str

@rt.tool
def area(width: int, height: int) -> int:
    """The area."""
    return width * height

@rt.function
def program(s: rt.State, country: str, k: int = 2) -> str:
    legs = rt.gen("legs", int, max_tokens=4)
    city = rt.gen("city", City)
    words = rt.gen("words", n=3)
    pick = rt.select("pick", ["a", "b"])
    s += legs
    s += city
    reveal_type(s[legs])
    reveal_type(s[city])
    reveal_type(s[pick])
    reveal_type(s[words])
    reveal_type(s[area.call("r")])
    reveal_type(s.fork(2).values(legs))
    reveal_type(area(2, 3))
    return country

@rt.function
async def asynchronous(s: rt.State) -> int:
    legs = rt.gen("legs", int)
    s += legs
    reveal_type(await s.get(legs))
    return await s.get(legs)

result = program.run("url", "France")
reveal_type(result.value)
reveal_type(asynchronous.run("url").value)
program("France", k=3)
program("France", k="three")
area("wide", 3)
'''


def test_what_mypy_sees(tmp_path: Path) -> None:
    source = tmp_path / "user.py"
    source.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(source)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    revealed = [line.split('"')[1].removeprefix("user.") for line in said.splitlines() if "Revealed type" in line]
    assert [one.replace("builtins.", "") for one in revealed] == [
        "int",
        "City",
        "str",
        "list[str]",
        "frontend_lang.tools.ToolResult",
        "list[int]",
        "int",
        "int",
        "str",
        "int",
    ]
    errors = [line for line in said.splitlines() if ": error:" in line]
    assert len(errors) == 2, said
    assert '"k"' in errors[0] or "arg-type" in errors[0]
    assert "arg-type" in errors[1]

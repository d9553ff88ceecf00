"""What the documents promise is true: commands parse, files exist, code compiles."""

from __future__ import annotations

import ast
import configparser
import re
import shlex
from pathlib import Path

import pytest
import yaml

from runtime.cli import build_parser, configs_of
from runtime.config import EngineConfig, ServerConfig
from runtime.options import check_yaml, resolve

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    lines = "\n".join(blocks(page, "sh") + blocks(page, "console")).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").split("#")[0].strip() for line in lines if "ramet " in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_ramet_command_in_a_page_parses(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command)
        words = words[words.index(next(word for word in words if word.endswith("ramet"))) + 1 :]
        args = build_parser().parse_args(words)
        if words[0] == "serve":
            configs_of(args)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_in_a_page_compiles(page: Path) -> None:
    for code in blocks(page, "python"):
        ast.parse(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_into_the_repository_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_ci_runs_the_readme_test_command() -> None:
    assert "make test" in (ROOT / ".ci/run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()


def test_the_deployed_options_are_options() -> None:
    data = check_yaml(yaml.safe_load((ROOT / "deploy/ramet.yaml").read_text()), (EngineConfig, ServerConfig))
    server = resolve(ServerConfig, {}, data)
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy/ramet.service")
    command = shlex.split(unit["Service"]["ExecStart"])
    assert build_parser().parse_args(command[1:]).config == "/etc/ramet/ramet.yaml"
    assert server.drain_timeout_s < float(unit["Service"]["TimeoutStopSec"])
    assert unit["Service"]["KillMode"] == "mixed"


def test_the_image_starts_and_is_probed_on_the_default_port() -> None:
    image = (ROOT / "deploy/Dockerfile").read_text()
    assert f"EXPOSE {ServerConfig().port}" in image
    assert f"127.0.0.1:{ServerConfig().port}/health" in image
    for name in ("radix", "kernels", "runtime", "frontend_lang", "ramet.py"):
        assert re.search(rf"^COPY {name} ", image, flags=re.MULTILINE)
    for name in re.findall(r"\bRAMET_([A-Z_]+)=", image):
        known = {field.upper() for config in (EngineConfig, ServerConfig) for field in config.__dataclass_fields__}
        assert name == "CACHE" or name in known


def test_constraints_pin_what_the_project_names() -> None:
    """Every pin is exact, and torch (whose loose range is gigabytes) is among them."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9.]+", pin) for pin in pins)
    assert any(pin.startswith("torch==") for pin in pins)

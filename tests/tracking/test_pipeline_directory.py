"""A pipeline's folder: its manifest, its number, its lock, and what is said of it while it is there in part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strop.errors import RunFailure, UserError
from strop.tracking.pipeline_directory import PipelineDirectory, pipeline_status, read_pipeline, stage_status
from strop.tracking.pipelines import show_pipeline
from strop.tracking.run_directory import RunDirectory


def create(folder: Path, name: str = "p") -> PipelineDirectory:
    return PipelineDirectory.create(folder, name, ["sft", "ppo"])


def test_pipelines_of_one_name_count_up_and_pass_by_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "p-2").mkdir()
    (tmp_path / "p-2" / "notes").write_text("mine")
    first, second = create(tmp_path), create(tmp_path)
    assert (first.path.name, second.path.name, second.manifest.number) == ("p", "p-3", 3)
    assert PipelineDirectory.latest(tmp_path, "p") == second.path
    assert PipelineDirectory.latest(tmp_path, "q") is None
    assert not list(tmp_path.glob(".*"))
    for pipeline in (first, second):
        pipeline.close()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    with create(tmp_path) as pipeline:
        pipeline.update_stage("sft", run="sft", status="running", config_hash="cafe", replaced=("old",))
        found = read_pipeline(pipeline.path)
        assert found == pipeline.manifest
        assert found.stage("gone") is None
    path = pipeline.path / "pipeline.json"
    values = json.loads(path.read_text())
    values["later"] = values["stages"][0]["later"] = 1
    path.write_text(json.dumps(values))
    entry = read_pipeline(pipeline.path).stage("sft")
    assert entry is not None
    assert (entry.run, entry.config_hash, entry.replaced) == ("sft", "cafe", ("old",))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    held = create(tmp_path)
    with pytest.raises(UserError, match="is being trained by process"):
        PipelineDirectory.open(held.path)
    held.close()
    with PipelineDirectory.open(held.path) as again:
        assert len(again.manifest.resumed) == 1


def test_how_it_ended(tmp_path: Path) -> None:
    pipeline = create(tmp_path)
    with pytest.raises(RunFailure), pipeline:
        raise RunFailure("the disk is full")
    assert (read_pipeline(pipeline.path).status, read_pipeline(pipeline.path).error) == ("failed", "the disk is full")
    with pytest.raises(KeyboardInterrupt), PipelineDirectory.open(pipeline.path):
        raise KeyboardInterrupt
    assert (read_pipeline(pipeline.path).status, read_pipeline(pipeline.path).error) == ("interrupted", "")


def test_one_whose_process_is_gone_is_interrupted(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom strop.tracking.pipeline_directory import PipelineDirectory\n"
        "from strop.tracking.run_directory import RunDirectory\n"
        f"p = PipelineDirectory.create({str(tmp_path)!r}, 'p', ['sft', 'ppo'])\n"
        "p.update_stage('sft', run='sft', status='running')\n"
        "RunDirectory.create(p.path, 'sft', config_yaml='', steps=4)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    folder = tmp_path / "p"
    manifest = read_pipeline(folder)
    assert manifest.status == "running"
    assert pipeline_status(folder, manifest) == "interrupted"
    assert [stage_status(folder, entry) for entry in manifest.stages] == ["interrupted", "waiting"]
    shown = show_pipeline(folder).splitlines()
    assert shown[0] == "p: interrupted, 0 of 2 stages done"
    assert shown[1].split()[:3] == ["sft", "interrupted", "0/4"]
    assert shown[2].split() == ["ppo", "waiting"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stages": [{}]}', '{"stages": 3}'])
def test_a_manifest_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "pipeline.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        read_pipeline(tmp_path)


def test_a_folder_that_is_no_pipeline(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no pipeline in this folder"):
        read_pipeline(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        create(tmp_path / "file")


def test_a_run_of_the_name_is_in_nobodys_way(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "p", config_yaml="").close()
    with create(tmp_path) as pipeline:
        assert pipeline.path.name == "p-2"
    assert PipelineDirectory.latest(tmp_path, "p") == pipeline.path
    assert RunDirectory.latest(tmp_path, "p") == tmp_path / "p"

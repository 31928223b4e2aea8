"""Training artifacts move into place without following links (B25); kept replay stores; directories of crews."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from supervisor.workspace import ArtifactRefused, Workspace, check_artifact_free, place_artifact


@pytest.fixture
def made(tmp_path: Path) -> Path:
    source = tmp_path / "made"
    source.write_bytes(b"weights")
    (tmp_path / "training").mkdir()
    return source


def test_an_artifact_is_moved_and_digested(tmp_path: Path, made: Path) -> None:
    artifact = place_artifact(made, tmp_path / "training", "a.pkl", overwrite=False)
    target = tmp_path / "training" / "a.pkl"
    assert target.read_bytes() == b"weights"
    assert (artifact.sha256, artifact.bytes) == (hashlib.sha256(b"weights").hexdigest(), 7)
    assert target.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "training") == ["a.pkl"]


def test_an_existing_artifact_stays_unless_asked(tmp_path: Path, made: Path) -> None:
    target = tmp_path / "training" / "a.pkl"
    target.write_bytes(b"old")
    with pytest.raises(ArtifactRefused) as refused:
        place_artifact(made, tmp_path / "training", "a.pkl", overwrite=False)
    assert refused.value.error_type == "ArtifactExists"
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path / "training") == ["a.pkl"]
    place_artifact(made, tmp_path / "training", "a.pkl", overwrite=True)
    assert target.read_bytes() == b"weights"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_at_the_target_is_never_followed(tmp_path: Path, made: Path, overwrite: bool) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "training" / "a.pkl").symlink_to(victim)
    if overwrite:
        place_artifact(made, tmp_path / "training", "a.pkl", overwrite=True)
        assert not (tmp_path / "training" / "a.pkl").is_symlink()
    else:
        with pytest.raises(ArtifactRefused):
            place_artifact(made, tmp_path / "training", "a.pkl", overwrite=False)
    assert victim.read_bytes() == b"precious"


def test_what_is_no_file_at_the_source_is_refused_at_once(tmp_path: Path, made: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"token")
    for name in ("link", "directory", "fifo", "nothing"):
        source = tmp_path / name
        if name == "link":
            source.symlink_to(secret)
        elif name == "directory":
            source.mkdir()
        elif name == "fifo":
            os.mkfifo(source)
        with pytest.raises(ArtifactRefused) as refused:
            place_artifact(source, tmp_path / "training", "a.pkl", overwrite=False)
        assert refused.value.error_type == "ArtifactMissing"
    assert os.listdir(tmp_path / "training") == []


def test_a_taken_name_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").symlink_to(tmp_path / "dangling")
    with pytest.raises(ArtifactRefused):
        check_artifact_free(tmp_path, "a.pkl", overwrite=False)
    check_artifact_free(tmp_path, "a.pkl", overwrite=True)
    check_artifact_free(tmp_path, "b.pkl", overwrite=False)


def test_a_replay_store_outlives_its_job_and_is_copied_per_replay(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work")
    workspace.prepare(1, "crew")
    (workspace.job(1) / "replay.db").write_bytes(b"rows")
    workspace.keep_replay(1)
    workspace.remove_job(1)
    workspace.prepare(2, "crew")
    copy = workspace.copy_replay(1, 2)
    assert copy is not None
    assert copy.read_bytes() == b"rows"
    copy.write_bytes(b"changed by the replay")
    workspace.prepare(3, "crew")
    again = workspace.copy_replay(1, 3)
    assert again is not None
    assert again.read_bytes() == b"rows"
    workspace.forget(1)
    assert workspace.copy_replay(1, 3) is None


def test_a_copy_of_a_replay_store_follows_and_replaces_nothing(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for row in (1, 2):
        workspace.prepare(row, "crew")
    (workspace.job(1) / "replay.db").write_bytes(b"rows")
    workspace.keep_replay(1)
    (workspace.job(2) / "replay.db").symlink_to(victim)
    with pytest.raises(FileExistsError):
        workspace.copy_replay(1, 2)
    (tmp_path / "work" / "replays" / "3.db").symlink_to(victim)
    workspace.prepare(4, "crew")
    with pytest.raises(OSError, match="symbolic links"):
        workspace.copy_replay(3, 4)
    assert victim.read_bytes() == b"precious"
    assert sorted(os.listdir(workspace.job(4))) == ["cwd", "tmp"]


@pytest.mark.parametrize("crew_id", ["../../etc", "a/b", "", "x" * 256, "ü", ".", "a b"])
def test_any_crew_id_gets_one_directory_of_its_own(tmp_path: Path, crew_id: str) -> None:
    workspace = Workspace(tmp_path / "work")
    paths = workspace.prepare(7, crew_id)
    crews = tmp_path / "work" / "crews"
    assert Path(paths.home).parent.parent == crews
    assert Path(paths.home).is_dir()
    assert workspace.prepare(8, crew_id + "2").home != paths.home

"""Puts this repository's packages on the path where they are not installed, so that a bare machine can run them."""

import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make_importable() -> None:
    """Put irframework and its plugins on the path, with metadata so that their entry points are found.

    A distribution that is installed is left as it is. Subprocesses inherit the path. Needs Python 3.11.
    """
    import tomllib

    target = Path(tempfile.mkdtemp(prefix="irframework_metadata_"))
    added = [str(target)]
    for pyproject in [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]:
        project = tomllib.loads(pyproject.read_text())["project"]
        try:
            metadata.distribution(project["name"])
            continue
        except metadata.PackageNotFoundError:
            pass
        info = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = project.get("entry-points", {}).items()
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups]
        (info / "entry_points.txt").write_text("\n".join(lines))
        source = pyproject.parent / "src"
        added.append(str(source if source.is_dir() else pyproject.parent))
    sys.path[:0] = added
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*added, os.environ.get("PYTHONPATH")]))

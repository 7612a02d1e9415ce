"""Check that every wheel in a folder holds the modules; python .ci/check_wheel.py FOLDER.

`python -m build` makes the sdist, and the wheel from that sdist. The wheel straight from the tree is made
here. hatchling makes an empty wheel without an error where the sdist left out the folders.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WANTED = {
    "gpuidle/__init__.py",
    "gpuidle/__main__.py",
    "gpuidle/py.typed",
    "gpuidle/agent/cli.py",
    "gpuidle/agent/commands/watch.py",
    "gpuidle/collectors/table.py",
    "gpuidle/exporters/catalogue.py",
}


def main(folder: Path) -> None:
    """Check the wheel made from the sdist in `folder`, and one made from the tree."""
    with tempfile.TemporaryDirectory() as direct:
        command = [sys.executable, "-m", "build", "--wheel", "--outdir", direct, "."]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wheels = [*folder.glob("*.whl"), *Path(direct).glob("*.whl")]
        if len(wheels) != 2:
            sys.exit(f"expected one wheel in {folder} and one from the tree, got {wheels}")
        modules = {str(p) for top in ("agent", "collectors", "exporters") for p in Path(top).rglob("*.py")}
        wanted = WANTED | {f"gpuidle/{module}" for module in modules}
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                missing = wanted - set(archive.namelist())
            if missing:
                sys.exit(f"{wheel} lacks {sorted(missing)}")
            print(f"{wheel.name}: {len(wanted)} modules")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

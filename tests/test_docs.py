"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_tests_that_the_table_of_faults_names_exist() -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 25
    for path, function in named:
        file = ROOT / path
        assert file.is_file(), path
        assert not function or re.search(rf"^(async )?def {function}\(", file.read_text(), re.MULTILINE), (
            function
        )


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"

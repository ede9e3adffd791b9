"""The documentation builds as a site without a warning."""

import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

for package in ("mkdocs", "mkdocstrings"):
    pytest.importorskip(package, reason=f"needs {package} (the dev extra)")


def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = [page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "README"]
    assert all((tmp_path / page / "index.html").exists() for page in pages)
    assert "mkdocs build\n" in (ROOT / "Makefile").read_text()  # -q would hide dead links from `strict`
    assert "white-space: normal" in (tmp_path / "site.css").read_text()  # cells of tables wrap

"""Writes .github/workflows from the table of compatible versions of Python and torch: `make workflows`.

A test compares the files with the table, so neither can be edited without the other.
"""

from __future__ import annotations

from pathlib import Path

WORKFLOWS = Path(__file__).parents[1] / ".github" / "workflows"

# For each version of Python, the versions of torch for which the package index has Linux wheels.
_SINCE_2_6 = ("2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
TORCH = {
    "3.10": _SINCE_2_6[:-1],
    "3.11": _SINCE_2_6,
    "3.12": _SINCE_2_6,
    "3.13": _SINCE_2_6,
    "3.14": _SINCE_2_6[_SINCE_2_6.index("2.9") :],
}
CIBUILDWHEEL = "4.3.5"
_SAID = "Paceline runs on Linux only"


def tests() -> str:
    """Returns the workflow that runs the tests: in full once, and without slow parts for each pair of versions."""
    pairs = "".join(
        f'          - {{ python: "{python}", torch: "{torch}" }}\n'
        for python, versions in TORCH.items()
        for torch in versions
    )
    return f"""# Written by release/matrix.py; change the table there, then run `make workflows`.
name: tests
on: [push, pull_request]
permissions:
  contents: read
jobs:
  whole:
    runs-on: ubuntu-24.04
    timeout-minutes: 90
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: bash .ci/run
      - run: make wheel

  site:
    runs-on: ubuntu-24.04
    timeout-minutes: 15
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: make site

  pairs:
    runs-on: ubuntu-24.04
    timeout-minutes: 60
    strategy:
      fail-fast: false
      matrix:
        include:
{pairs}    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: ${{{{ matrix.python }}}}
      - run: python -m pip install "torch==${{{{ matrix.torch }}}}.*" ".[test]"
      - run: python -m pytest -m "not soak and not gpu" -n 3 --dist loadfile --no-loadscope-reorder

  elsewhere:
    runs-on: ${{{{ matrix.system }}}}
    timeout-minutes: 15
    strategy:
      fail-fast: false
      matrix:
        system: [macos-latest, windows-latest]
    defaults:
      run:
        shell: bash
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - name: pip install ends with a sentence
        run: "! python -m pip install . > said 2>&1 && grep '{_SAID}' said"
      - name: import ends with a sentence
        run: "! PYTHONPATH=src python -c 'import paceline' > said 2>&1 && grep '{_SAID}' said"
"""


def wheels() -> str:
    """Returns the workflow that builds the published files."""
    return f"""# Written by release/matrix.py, which `make workflows` runs.
name: wheels
on:
  workflow_dispatch:
  push:
    tags: ["v*"]
permissions:
  contents: read
jobs:
  wheels:
    runs-on: ${{{{ matrix.system }}}}
    timeout-minutes: 90
    strategy:
      fail-fast: false
      matrix:
        system: [ubuntu-24.04, ubuntu-24.04-arm]
    steps:
      - uses: actions/checkout@v4
      - run: pipx run cibuildwheel=={CIBUILDWHEEL}
      - uses: actions/upload-artifact@v4
        with:
          name: wheels-${{{{ matrix.system }}}}
          path: wheelhouse/*.whl

  sdist:
    runs-on: ubuntu-24.04
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@v4
      - run: pipx run build --sdist
      - run: python -m pip wheel --no-deps dist/*.tar.gz
      - uses: actions/upload-artifact@v4
        with:
          name: sdist
          path: dist/*.tar.gz
"""


FILES = {"tests.yml": tests, "wheels.yml": wheels}


def main() -> None:
    """Writes the workflow files."""
    WORKFLOWS.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (WORKFLOWS / name).write_text(text())


if __name__ == "__main__":
    main()

"""Write the copies of the CRD: ``python -m octavo_operator.crd`` in a checkout."""

from __future__ import annotations

from pathlib import Path

COPIES = ("charts/octavo/files/crd.yaml", "manifests/crd.yaml")


def write_copies(root: Path) -> None:
    text = Path(__file__).with_name("crd.yaml").read_text()
    for copy in COPIES:
        (root / copy).write_text(text)


if __name__ == "__main__":
    write_copies(Path(__file__).parents[2])

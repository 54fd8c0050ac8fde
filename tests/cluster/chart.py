"""The Helm chart under test."""

from pathlib import Path

from cluster.access import Cluster

CHART = Path(__file__).parents[2] / "charts" / "octavo"
SYSTEM = "octavo-system"  # the operator's namespace


def values(cluster: Cluster) -> list[str]:
    """Flags of helm that make the chart use the images under test."""
    octavo_image, octavo_tag = cluster.images.octavo.rsplit(":", 1)
    engine_image, engine_tag = cluster.images.engine.rsplit(":", 1)
    return [
        f"--set=image.repository={octavo_image}",
        f"--set=image.tag={octavo_tag}",
        f"--set=engineImage.repository={engine_image}",
        f"--set=engineImage.tag={engine_tag}",
    ]

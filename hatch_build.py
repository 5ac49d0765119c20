"""What a release says of where the project lives: `HALFBYTE_ADDRESS=https://... make wheel`; without an address nothing.

An index of packages shows README.md away from its folder, so links become absolute, at the tag of the version.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: What stands ahead of a link within the project, and where a forge shows such a file: a page, or a picture's bytes.
LINKS = {"blob": r"\]\(", "raw": r'(?:src|srcset)="'}


class Address(MetadataHookInterface):
    """The project's URLs, and README.md as the description."""

    def update(self, metadata: dict[str, Any]) -> None:
        address, tag = os.environ.get("HALFBYTE_ADDRESS", "").rstrip("/"), f"v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if address:
            metadata["urls"] = {
                "Source": address,
                "Documentation": f"{address}/blob/{tag}/docs/index.md",
                "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
            for shown, ahead in LINKS.items():
                text = re.sub(rf"({ahead})(?![a-z]+:|#)", rf"\g<1>{address}/{shown}/{tag}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

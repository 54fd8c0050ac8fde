"""The fakes of this folder are a plain module beside the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""Write src/trainpace/core/typical_hosts.json from the catalogue of host CPUs; a test compares the two.

python tools/typical_hosts.py
"""

from pathlib import Path

from trainpace.core.hardware import typical_hosts
from trainpace.core.records import to_json, write_whole

FILE = Path(__file__).parents[1] / "src/trainpace/core/typical_hosts.json"

if __name__ == "__main__":
    write_whole(FILE, to_json(typical_hosts(), indent=1) + "\n")

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# a busy machine is no reason to fail: nothing here is a timed test
settings.register_profile("trainpace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trainpace")

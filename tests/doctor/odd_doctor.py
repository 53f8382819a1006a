"""A doctor on a node whose clock goes wrong, or which has other versions: `odd_doctor.py AHEAD VERSION WORDS...`."""

from __future__ import annotations

import sys
import time

from launch.identity import versions
from moesaic.doctor import examined

ahead, version, words = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
known = versions() if version == "-" else {**versions(), "moesaic": version}
doctor, _ = examined(words, False, 20.0, clock=lambda: time.time() + ahead, known_versions=known)
sys.exit(any(finding.state == "broken" for finding in doctor.run()))

"""All faults of a log in a store that an engine follows."""

from __future__ import annotations

from tests.faults.host_faults import HOST
from tests.faults.store_answers import ANSWERS
from tests.faults.store_objects import OBJECTS
from tests.faults.store_writers import WRITERS

STORE = [*WRITERS, *ANSWERS, *OBJECTS, *HOST]

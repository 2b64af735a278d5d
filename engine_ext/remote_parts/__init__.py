"""Parts on hosts that have no spool: fetched once per host, and kept for its ranks.

The server's process spools a part on one host. Ranks on other hosts get it by its content hash:
`fetch` reads it over HTTP from where the operation says, and `cache` keeps it in a folder that all
ranks of a host share, and all engines. `local_folder` is where others have links to what it keeps.

Imports: `engine_ext.format`, `engine_ext.files`, `engine_ext.settings`, `engine_ext.errors`.
"""

from engine_ext.remote_parts.cache import PartCache
from engine_ext.remote_parts.local_folder import LocalFolder
from engine_ext.remote_parts.locate import Locate, PartLocator, locator

__all__ = ["LocalFolder", "Locate", "PartCache", "PartLocator", "locator"]

"""Tools' output to a cluster profile: `nccl_tests`, `topo_matrix`, `p2p`, `topo_xml` read, `findings` judges, `assemble` builds.

Reading is tolerant of what surrounds the numbers (prefixes of launchers, indentation, cut rows) and tells what it left out.
"""

from __future__ import annotations

from simulator.importers.assemble import Imported, assemble, read_files
from simulator.importers.findings import Finding, doctor, slow_nodes

__all__ = ["Finding", "Imported", "assemble", "doctor", "read_files", "slow_nodes"]

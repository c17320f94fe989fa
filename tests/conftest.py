"""Settings of the process that must be there before torch is imported, here and in child processes."""

from __future__ import annotations

import os
import resource

# The models are tiny: a second thread costs more than it computes, on a loaded machine a hundred times more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# In-process tensor-parallel ranks keep their sockets to the end; a usual limit of 1024 would just do.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
_most = 65536 if _hard == resource.RLIM_INFINITY else min(_hard, 65536)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(_soft, _most), _hard))

"""D0's side of a cluster of processes; begin with ``clusters.open_cluster``.

``process_cluster`` has the requests, ``run`` what lives from a start of the processes to their end.
"""

"""The live page: ``feed`` notes events in the cluster's thread, ``live`` sends them from the event loop."""

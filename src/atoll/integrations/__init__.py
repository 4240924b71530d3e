"""Other people's training loops: one file a framework, which is imported only when that is asked for."""

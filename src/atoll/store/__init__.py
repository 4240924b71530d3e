"""The server's files on disk: the journal, the tensor files (slots), published objects and the audit log."""

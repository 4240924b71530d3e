"""The server's files on disk: a database (the journal), tensor files (slots), published objects and the audit log."""

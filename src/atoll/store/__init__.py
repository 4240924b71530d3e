"""What a server keeps on disk: the journal, slots of tensors, objects and the audit log."""

"""The words that supervisor and worker share. Nothing in here does IO or imports the other two packages."""

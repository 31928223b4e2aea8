"""What the tests stand on: a real server in a process of its own, a strict client, process identities."""

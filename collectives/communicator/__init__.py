"""The communicator: its collectives, handles, membership and recovery."""

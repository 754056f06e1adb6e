"""The communicator: its collectives, handles, and the plan of its job."""

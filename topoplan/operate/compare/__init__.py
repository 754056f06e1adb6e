"""Compare what allocations, servers, faults, descriptions and logs reach with what their links allow."""

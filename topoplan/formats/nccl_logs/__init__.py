"""What NCCL's tools print, as it stands there: tables of nccl-tests and `topoplan bench`, logs of NCCL_DEBUG=INFO."""

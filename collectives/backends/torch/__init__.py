"""The torch back end: plans over the process group of a training job."""

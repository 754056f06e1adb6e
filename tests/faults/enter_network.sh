#!/bin/sh
# In place of ssh: enter_network.sh [OPTION...] ADDRESS COMMAND... runs it in the network namespace of that name.
while [ "${1#-}" != "$1" ]; do shift; done
namespace=$1
shift
exec ip netns exec "$namespace" unshare --uts sh -c "hostname host${namespace##*.}; $*"

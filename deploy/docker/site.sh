#!/bin/sh
# site.sh COMMAND...: enrol this site if it has not, then take part in its run with COMMAND, such as python train.py.
# The invitation is in ATOLL_INVITATION, or in the file INVITATION_FILE. ATOLL_CREDENTIAL and ATOLL_DIR are folders of
# a volume: a site that comes back needs its credential, and the work that it had in hand.
set -eu
if [ ! -e "$ATOLL_CREDENTIAL/credential.json" ]; then
    if [ -n "${INVITATION_FILE:-}" ]; then
        atoll enrol - --dir "$ATOLL_CREDENTIAL" <"$INVITATION_FILE"
    else
        atoll enrol --dir "$ATOLL_CREDENTIAL"
    fi
fi
unset ATOLL_INVITATION INVITATION_FILE
exec atoll worker -- "$@"

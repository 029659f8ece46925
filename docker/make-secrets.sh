#!/bin/sh
# Makes docker/secrets with random passwords and tokens, each once: what is there stays. The files can be read by the
# containers' users, which are not this one; the folder keeps everybody else on this machine out.
set -eu
folder="$(dirname "$0")/secrets"
umask 077
mkdir -p "$folder"
for name in redis_password admin_token read_token grafana_password; do
    if [ ! -s "$folder/$name" ]; then
        python3 -c 'import secrets; print(secrets.token_hex(32))' > "$folder/$name"
        chmod 0444 "$folder/$name"
        echo "made $folder/$name"
    fi
done

#!/bin/sh
# Makes the services' certificate and token, and the key for callers of the gateway, in folder $1,
# unless they are there and still valid.
# The certificate is its own authority: whoever calls the services trusts this one file.
# PACELINE_NAMES: further names the services are called by, such as "DNS:gpu1.lan,IP:10.0.0.7".
set -eu
cd "$1"
umask 077
for secret in token api-key; do
    if [ ! -s $secret ]; then
        openssl rand -hex 32 > new
        mv new $secret
        echo "made $secret"
    fi
done
names="DNS:localhost,IP:127.0.0.1,DNS:verifier,DNS:drafter,DNS:gateway${PACELINE_NAMES:+,$PACELINE_NAMES}"
# Valid for a week more, and for the same names.
if [ "$(cat names 2> /dev/null)" != "$names" ] || ! openssl x509 -in tls.crt -noout -checkend 604800; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 \
        -subj /CN=paceline -addext "subjectAltName=$names" \
        -keyout tls.key.new -out tls.crt.new 2> /dev/null
    mv tls.key.new tls.key
    mv tls.crt.new tls.crt
    echo "$names" > names
    echo "made a certificate for $names"
fi

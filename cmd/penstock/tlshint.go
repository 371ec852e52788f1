package main

import (
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A hintedError is an error of a command with a guess at its cause, which explain
// prints in place of its own.
type hintedError struct {
	error
	hint string
}

// Unwrap implements the convention of package errors.
func (e *hintedError) Unwrap() error { return e.error }

// hinted adds to err what it may have to do with TLS, if anything: the two ends
// of a connection learn little from each other where one of them speaks TLS and
// the other does not, or refuses the other's certificate.
func (c *connection) hinted(err error) error {
	if err == nil {
		return nil
	}
	if hint := c.tlsHint(err.Error()); hint != "" {
		return &hintedError{error: err, hint: hint}
	}
	if status.Code(err) == codes.Unavailable && c.endpoint.command != "" {
		return &hintedError{error: err, hint: "is `" + c.endpoint.command + "` running, and is --" + c.endpoint.flag + " its address?"}
	}
	return err
}

// tlsHint says which flag to look at, or "".
func (c *connection) tlsHint(text string) string {
	says := func(phrases ...string) bool {
		for _, p := range phrases {
			if strings.Contains(text, p) {
				return true
			}
		}
		return false
	}
	cutOff := says("error reading server preface", "connection reset by peer", "broken pipe")
	switch secure := c.tls || c.ca != "" || c.cert != ""; {
	case says("looked like an HTTP/1.1 header"):
		return "HTTP answers there, as it does for /metrics; --" + c.endpoint.flag + " must be the address of gRPC, its --listen"
	case !secure && (cutOff || says("requires TLS")):
		return "does the node want TLS? Give --ca, or --tls where its certificate is of a CA that this machine trusts"
	case !secure:
		return ""
	case says("certificate signed by unknown authority", "certificate is not trusted"):
		return "--ca must name the CA that signed the node's certificate"
	case says("x509: certificate is valid for", "x509: certificate is not valid for", "x509: cannot validate certificate for"):
		return "--server must be a name that the node's certificate holds"
	case says("first record does not look like a TLS handshake"):
		return "the node speaks plain text: leave out --tls, --ca and --cert"
	case says("certificate has expired or is not yet valid"):
		return "the node's certificate has expired, or this machine's clock is wrong"
	case says("tls: expired certificate"):
		return "the certificate of --cert has expired, or the node's clock is wrong"
	case says("tls: unknown certificate authority", "tls: bad certificate"):
		return "the node's auth.client_ca must name the CA that signed the certificate of --cert"
	case c.cert == "" && (cutOff || says("tls: certificate required")):
		return "does the node want a client's certificate? If so, give one with --cert and --key"
	}
	return ""
}

package main

import (
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A hintedError is an error with a hint about its probable cause. explain prints the hint in place
// of the error.
type hintedError struct {
	error
	hint string
}

// Unwrap implements the convention of package errors.
func (e *hintedError) Unwrap() error { return e.error }

// hinted adds a hint about TLS to err if TLS is a probable cause. If only one end of a connection
// uses TLS, or if one end refuses the certificate of the other, neither end gets a clear error. A node that has no roles
// document from etcd runs, so the hint concerns the document.
func (c *connection) hinted(err error) error {
	if err == nil {
		return nil
	}
	if hint := c.tlsHint(err.Error()); hint != "" {
		return &hintedError{error: err, hint: hint}
	}
	if strings.Contains(err.Error(), "no roles document from etcd") {
		return &hintedError{error: err, hint: "does etcd answer, and has it a valid document? `penstock cluster roles set --config` writes it in etcd itself"}
	}
	if status.Code(err) == codes.Unavailable && c.endpoint.command != "" {
		return &hintedError{error: err, hint: "is `" + c.endpoint.command + "` running, and is --" + c.endpoint.flag + " its address?"}
	}
	return err
}

// tlsHint returns the flag to check, or "".
func (c *connection) tlsHint(text string) string {
	contains := func(phrases ...string) bool {
		for _, p := range phrases {
			if strings.Contains(text, p) {
				return true
			}
		}
		return false
	}
	cutOff := contains("error reading server preface", "connection reset by peer", "broken pipe")
	switch secure := c.tls || c.ca != "" || c.cert != ""; {
	case contains("looked like an HTTP/1.1 header"):
		return "HTTP answers there, as it does for /metrics; --" + c.endpoint.flag + " must be the address of gRPC, its --listen"
	case !secure && (cutOff || contains("requires TLS")):
		return "does the node want TLS? Give --ca, or --tls where its certificate is of a CA that this machine trusts"
	case !secure:
		return ""
	case contains("certificate signed by unknown authority", "certificate is not trusted"):
		return "--ca must name the CA that signed the node's certificate"
	case contains("x509: certificate is valid for", "x509: certificate is not valid for", "x509: cannot validate certificate for"):
		return "--server must be a name that the node's certificate holds"
	case contains("first record does not look like a TLS handshake"):
		return "the node does not use TLS: omit --tls, --ca and --cert"
	case contains("certificate has expired or is not yet valid"):
		return "the node's certificate has expired, or this machine's clock is wrong"
	case contains("tls: expired certificate"):
		return "the certificate of --cert has expired, or the node's clock is wrong"
	case contains("tls: unknown certificate authority", "tls: bad certificate"):
		return "the node's auth.client_ca must name the CA that signed the certificate of --cert"
	case c.cert == "" && (cutOff || contains("tls: certificate required")):
		return "does the node want a client's certificate? If so, give one with --cert and --key"
	}
	return ""
}

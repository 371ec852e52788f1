// Package penstockv1 is the generated Go of penstock.proto, the control plane
// of a storage node; the proto file is its documentation. Regenerate with
// `make proto`. It holds messages and stubs only, no behaviour; package api
// converts them to and from kv.
package penstockv1

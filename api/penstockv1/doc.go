// Package penstockv1 is generated from penstock.proto, planner.proto and traffic.proto, whose
// comments document the messages. `make proto` regenerates it. It has messages, clients and server interfaces without
// behaviour; package api converts the messages to and from kv.
package penstockv1

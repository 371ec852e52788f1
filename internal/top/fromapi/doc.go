// Package fromapi converts the answers of nodes into the samples of package top.
//
//	pb.StatusResponse ─► Node ──────► top.Node ──┐
//	pb.Namespace ──────► Namespace ─► top.Namespace, for top.Node.Namespaces
//
// `penstock top` gets the messages over gRPC. The web console of a node makes them in its own process.
// The package is pure.
package fromapi

// Command coredns is CoreDNS with the plugins that serve the names of Services and pods, and no others:
// the many plugins of the full program need hundreds of modules. It is a module of its own, because
// CoreDNS and Kubernetes need different versions of some modules.
package main

import (
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() { coremain.Run() }

package netoracle

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/internal/certs"
)

// The files of a pod's credentials for its API server.
const (
	serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount/"
	tokenPath      = serviceAccount + "token"
	caPath         = serviceAccount + "ca.crt"
)

// KubernetesOptions are the options of a Kubernetes source. The zero value suits a pod whose
// service account may list nodes.
type KubernetesOptions struct {
	// Server is the URL of the API server. TokenFile and CAFile are the paths of the credentials.
	// Defaults: those of the Kubernetes pod in which this process runs.
	Server, TokenFile, CAFile string
	// Pod, Rack and Host are the names of the node labels whose values are the pod (of the
	// network), the rack and the host of a node. Defaults topology.kubernetes.io/zone,
	// topology.kubernetes.io/rack and kubernetes.io/hostname.
	Pod, Rack, Host string
	// Every is the interval between two requests for the list of nodes. Default 1 min.
	Every time.Duration
}

// Kubernetes reads the labels of nodes from the API server.
type Kubernetes struct {
	o      KubernetesOptions
	client *http.Client
}

var _ Source = (*Kubernetes)(nil)

// NewKubernetes returns a source. Outside a pod it fails unless the options name the server.
func NewKubernetes(o KubernetesOptions) (*Kubernetes, error) {
	if o.Server == "" {
		host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
		if host == "" || port == "" {
			return nil, fmt.Errorf("%w of the API server, and KUBERNETES_SERVICE_HOST is not set, so this process is not in a pod: name the server", errNoURL)
		}
		o.Server = "https://" + net.JoinHostPort(host, port)
		if o.TokenFile == "" {
			o.TokenFile = tokenPath
		}
		if o.CAFile == "" {
			o.CAFile = caPath
		}
	}
	for _, d := range []struct {
		p   *string
		def string
	}{{&o.Pod, "topology.kubernetes.io/zone"}, {&o.Rack, "topology.kubernetes.io/rack"}, {&o.Host, "kubernetes.io/hostname"}} {
		if *d.p == "" {
			*d.p = d.def
		}
	}
	if o.Every == 0 {
		o.Every = time.Minute
	}
	k := &Kubernetes{o: o, client: &http.Client{}}
	if o.CAFile != "" {
		pool, err := certs.Pool(o.CAFile)
		if err != nil {
			return nil, fmt.Errorf("netoracle: the API server's CA: %w", err)
		}
		k.client.Transport = &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}}
	}
	return k, nil
}

// Name implements Source.
func (k *Kubernetes) Name() string { return "kubernetes" }

// Every implements Source.
func (k *Kubernetes) Every() time.Duration { return k.o.Every }

// nodeList is a page of the list of nodes, with the nodes' metadata only.
type nodeList struct {
	Metadata struct {
		Continue string `json:"continue"`
	} `json:"metadata"`
	Items []struct {
		Metadata struct {
			Name   string            `json:"name"`
			Labels map[string]string `json:"labels"`
		} `json:"metadata"`
	} `json:"items"`
}

// metadataOnly is the media type of a list of nodes without spec and status.
const metadataOnly = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

// nodesPage is the number of nodes per request, and nodesPages the maximum number of requests.
const nodesPage, nodesPages = 500, 200

// Read implements Source. A node without the label Pod has no place. If no node has the label, Read
// fails, because the configured name of the label must be wrong.
func (k *Kubernetes) Read(ctx context.Context) (Reading, error) {
	r := Reading{Places: map[string]netcost.Place{}}
	nodes, next := 0, ""
	for page := 0; ; page++ {
		if page == nodesPages {
			return Reading{}, fmt.Errorf("netoracle: more than %d pages of nodes", nodesPages)
		}
		q := url.Values{"limit": {strconv.Itoa(nodesPage)}}
		if next != "" {
			q.Set("continue", next)
		}
		var list nodeList
		if err := getJSON(ctx, k.client, k.o.Server+"/api/v1/nodes?"+q.Encode(), metadataOnly, k.o.TokenFile, &list); err != nil {
			return Reading{}, fmt.Errorf("netoracle: nodes' labels: %w", err)
		}
		for _, n := range list.Items {
			nodes++
			l := n.Metadata.Labels
			if l[k.o.Pod] == "" {
				continue
			}
			host := l[k.o.Host]
			if host == "" {
				host = n.Metadata.Name
			}
			r.Places[n.Metadata.Name] = netcost.Place{Pod: l[k.o.Pod], Rack: l[k.o.Rack], Node: host}
		}
		if next = list.Metadata.Continue; next == "" {
			break
		}
	}
	switch {
	case nodes == 0:
		return Reading{}, errors.New("netoracle: the API server lists no node; may the service account list nodes?")
	case len(r.Places) == 0:
		return Reading{}, fmt.Errorf("netoracle: none of %d nodes has the label %s; name the label that has the pod", nodes, k.o.Pod)
	}
	return r, nil
}

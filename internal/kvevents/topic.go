package kvevents

import (
	"fmt"
	"strings"
)

// DefaultTopic is kv@POD@MODEL, as llm-d and AIBrix read it, with a pod of its own for
// each namespace of each node.
const DefaultTopic = "kv@{node}/{namespace}@{namespace}"

// Topic is a pattern of topics: {node} is the name that a node has, {namespace} that
// of a namespace.
type Topic string

// Check reports whether topics made of t tell nodes and namespaces apart, where there
// can be several.
func (t Topic) Check(nodes int, namespace string) error {
	if rest := strings.NewReplacer("{node}", "", "{namespace}", "").Replace(string(t)); strings.ContainsAny(rest, "{}") {
		return fmt.Errorf("kvevents: topic %q: only {node} and {namespace} can be in braces", string(t))
	}
	if nodes > 1 && !strings.Contains(t.pod(), "{node}") {
		return fmt.Errorf("kvevents: topic %q has the same pod, %q, for all %d nodes: what one of them removes would be removed of all; put {node} into it", string(t), t.pod(), nodes)
	}
	if namespace == "" && !strings.Contains(string(t), "{namespace}") {
		return fmt.Errorf("kvevents: topic %q is the same for all namespaces: put {namespace} into it, or publish one namespace", string(t))
	}
	return nil
}

// pod returns the part that consumers take for the publisher's identity: what is
// between the first and the second @, or all of it.
func (t Topic) pod() string {
	if parts := strings.SplitN(string(t), "@", 3); len(parts) == 3 {
		return parts[1]
	}
	return string(t)
}

// shared reports whether the namespaces of a node have one pod.
func (t Topic) shared() bool { return !strings.Contains(t.pod(), "{namespace}") }

// of returns the topic of a namespace of a node.
func (t Topic) of(node, namespace string) string {
	return strings.NewReplacer("{node}", node, "{namespace}", namespace).Replace(string(t))
}

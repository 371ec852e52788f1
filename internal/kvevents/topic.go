package kvevents

import (
	"fmt"
	"strings"
)

// DefaultTopic has the form kv@POD@MODEL, which llm-d and AIBrix require. With it each namespace of
// each node is a separate pod.
const DefaultTopic = "kv@{node}/{namespace}@{namespace}"

// Topic is a pattern of topics. {node} stands for the name of the node and {namespace} for
// the name of the namespace.
type Topic string

// Check returns an error if several nodes or namespaces would have the same topic.
func (t Topic) Check(nodes int, namespace string) error {
	if rest := strings.NewReplacer("{node}", "", "{namespace}", "").Replace(string(t)); strings.ContainsAny(rest, "{}") {
		return fmt.Errorf("kvevents: topic %q: only {node} and {namespace} can be in braces", string(t))
	}
	if nodes > 1 && !strings.Contains(t.pod(), "{node}") {
		return fmt.Errorf("kvevents: topic %q has the same pod, %q, for all %d nodes, so consumers would apply one node's removals to all nodes; put {node} into it", string(t), t.pod(), nodes)
	}
	if namespace == "" && !strings.Contains(string(t), "{namespace}") {
		return fmt.Errorf("kvevents: topic %q is the same for all namespaces: put {namespace} into it, or publish one namespace", string(t))
	}
	return nil
}

// pod returns the part of a topic by which consumers identify the publisher: the part between the
// first and the second @, or the whole topic if there are not two of them.
func (t Topic) pod() string {
	if parts := strings.SplitN(string(t), "@", 3); len(parts) == 3 {
		return parts[1]
	}
	return string(t)
}

// shared reports whether all namespaces of a node have the same pod.
func (t Topic) shared() bool { return !strings.Contains(t.pod(), "{namespace}") }

// of returns the topic of a namespace of a node.
func (t Topic) of(node, namespace string) string {
	return strings.NewReplacer("{node}", node, "{namespace}", namespace).Replace(string(t))
}

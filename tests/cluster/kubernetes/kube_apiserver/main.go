// The API server of Kubernetes, with its own flags.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
}
